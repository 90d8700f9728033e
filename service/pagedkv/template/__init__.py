"""Chat templates: rendered in a process of their own, every character with its origin.

Imports nothing of the package but `errors`: the process that renders starts in a tenth of a second.
"""
