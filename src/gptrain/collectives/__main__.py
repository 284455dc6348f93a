"""Entry point of `python -m gptrain.collectives`."""

from gptrain.collectives.command import main

if __name__ == "__main__":
    main()
