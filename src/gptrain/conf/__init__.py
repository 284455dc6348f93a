"""Every choice that the library brings, and in base.yaml every key of a run with its default.

A file of the same name in the project's own conf/ replaces a file of this folder. Do not edit these
files in a project: an upgrade of the library replaces them.
"""
