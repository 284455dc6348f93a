"""python -m gptrain.ladder: see gptrain.ladder.command."""

from gptrain.ladder.command import main

if __name__ == "__main__":
    main()
