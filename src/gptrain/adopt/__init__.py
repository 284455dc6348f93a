"""Make a project of your own on top of this library: train.py, conf/, src/<name> and its tests.

python -m gptrain.adopt my_project --to ../my_project       with the library in src/gptrain
python -m gptrain.adopt my_project --to ../my_project library=git+https://github.com/me/gptrain
python -m gptrain.adopt my_project --to ../my_project recipes=[chat,lora]     with recipes in it
python -m gptrain.adopt --upgrade library=../gptrain        in a project: a newer library
python -m gptrain.adopt --check                             in a project: is its conf/ still valid

The new project is made from the project in which the command is typed, with your own files in conf/
and src/. Outside a project it is made from the examples that come with the library.
"""
