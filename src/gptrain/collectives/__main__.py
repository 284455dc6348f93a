"""python -m gptrain.collectives"""

from gptrain.collectives.command import main

main()
