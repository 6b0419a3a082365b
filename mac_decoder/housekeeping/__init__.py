"""Looking at what is kept, checking it and deleting it, in a decoder that runs."""
