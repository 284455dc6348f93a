"""python -m gptrain.export"""

from gptrain.export.verb import main

main()
