"""The campaign: `python -m gptrain.chaos [--quick] [--only F01,F08] [--seed 0] [--json FILE]`."""

from gptrain.chaos.campaign import main

main()
