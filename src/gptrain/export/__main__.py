"""python -m gptrain.export"""

from gptrain.export.command import main

main()
