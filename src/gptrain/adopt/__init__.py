"""A project of your own, made from this one: renamed, without the parts that you do not want.

python -m gptrain.adopt my_project --to ../my_project
python -m gptrain.adopt my_project --to ../my_project --without pipeline,campaign

parts.yaml names the files of each part. Rules about this repository (tests/house) stay here.
"""
