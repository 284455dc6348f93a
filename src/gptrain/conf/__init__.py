"""Every choice that the library brings, and in base.yaml every key of a run with its default.

A project's own conf/ is looked through first: a file of the same name there takes the place of one
here. Do not edit these for a project: a newer library brings them anew.
"""
