"""A project of your own on top of this library: train.py, conf/, src/<name>, its tests.

python -m gptrain.adopt my_project --to ../my_project       with the library in src/gptrain
python -m gptrain.adopt my_project --to ../my_project library=git+https://github.com/me/gptrain
python -m gptrain.adopt --upgrade library=../gptrain        in a project: a newer library
python -m gptrain.adopt --check                             in a project: is its conf/ still valid

It is made from the project in which this is typed, your own files in conf/ and src/project with it;
elsewhere from the examples that come with the library.
"""
