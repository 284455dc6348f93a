"""python -m gptrain.bench"""

from gptrain.bench.command import main

main()
