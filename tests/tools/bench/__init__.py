"""Compare the speed of several training loops that do the same work.

    python -m tests.tools.bench size=simple_gpt                    the tutorial's size
    python -m tests.tools.bench size=tiny                          what a loop adds to a 1 ms step
    python -m tests.tools.bench size=cpu trainer.devices=2         on two processes
    python -m tests.tools.bench steps=25 checkpoint=every_n_steps checkpoint.every_n_steps=20
                                                               gptrain's loop saves checkpoints
    python -m tests.tools.bench size=gpt2 model.compile=blocks trainer.precision=bf16-mixed

    size    tiny, cpu, simple_gpt, gpt2 or llama_124m: model and batch, which every key of train.py
            can change
    rounds  number of turns of each loop
    steps   number of steps in a turn
    loops   [tutorial, bare, ours]. The tutorial's net is a GPT with learned positions, so that
            llama_124m has [bare, ours]

All figures are in result.json of the run's folder. Each loop runs in its own processes and takes a
few steps in each turn, so that other load on the machine slows all loops equally. Ratios are taken
within a round. Only ratios are comparable between machines.
"""
