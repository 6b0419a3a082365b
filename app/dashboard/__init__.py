"""What the decoder shows to a browser, on its own port and inside its process.

``mount`` is what the decoder knows of it; ``login`` answers without NiceGUI; ``nice`` sets
NiceGUI up and is imported with it at the first page; the pages are in ``pages``.
"""
