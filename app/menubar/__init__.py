"""`baton app`: the icon in the menu bar, its menu and its windows. The only place that has Qt.

``app.view`` says what is shown; here it is laid out, and done. ``follow`` has the decoder's
status as it changes, ``place`` where the decoder is, ``decoder`` what starts and stops it;
none of these knows Qt.
"""
