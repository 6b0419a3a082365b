"""The durable tier: blocks and cuts as files that survive any crash. Start at FORMAT.md."""
