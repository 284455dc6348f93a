"""python -m gptrain.generate"""

from gptrain.generate.command import main

main()
