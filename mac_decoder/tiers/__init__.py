"""The fetched tiers behind their threads, which ``mac_decoder/keeper.py`` puts together."""
