"""Run the command `python -m gptrain.launch`."""

from gptrain.launch.command import main

main()
