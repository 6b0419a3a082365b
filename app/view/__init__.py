"""What every surface shows: a decoder's snapshot in words and numbers. Pure.

Menu bar, dashboard and `baton status` lay out what is made here; they compute and word nothing.
``facts`` has the parts, ``words`` how numbers read, and each page a file of its own.
"""
