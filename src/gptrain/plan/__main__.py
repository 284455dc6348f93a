"""python -m gptrain.plan: see gptrain.plan.command."""

from gptrain.plan.command import main

if __name__ == "__main__":
    main()
