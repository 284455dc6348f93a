"""The campaign: `python -m tests.campaign [--quick] [--only F01,F08] [--seed 0] [--json FILE]`."""

from tests.campaign.campaign import main

main()
