"""The OpenAI endpoint: HTTP in, engine events out as OpenAI objects."""
