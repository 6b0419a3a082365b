"""What a decoder tells of itself: one snapshot, and how it is kept up to date elsewhere.

``figures`` has the numbers that say how they are known, ``snapshot`` the sections, ``stream``
the messages of ``/status/stream``, with what makes them and what takes them in, ``schema``
the same for those who do not write Python. No text of a client, no token and no secret has a
field anywhere in here.
"""
