"""python -m gptrain.bench"""

from gptrain.bench.verb import main

main()
