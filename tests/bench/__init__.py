"""The same work in several training loops, side by side: which is faster, by how much, how surely.

    python -m tests.bench size=simple_gpt                    the tutorial's size
    python -m tests.bench size=tiny                          what a loop adds to a 1 ms step
    python -m tests.bench size=cpu trainer.devices=2         on two processes
    python -m tests.bench steps=25 checkpoint=every_n_steps checkpoint.every_n_steps=20
                                                               ours with a checkpoint now and then
    python -m tests.bench size=gpt2 model.compile=blocks trainer.precision=bf16-mixed
    python -m tests.bench target_loss=first                  GPT-2 and AdamW, Llama and Muon
    python -m tests.bench target_loss=1.9 configs="['experiment=a seed=7',experiment=b]"

    size    tiny, cpu, simple_gpt, gpt2: model and batch; every key of train.py changes them
    rounds  turns of each loop              steps  of a turn
    loops   [tutorial, bare, ours]
    target_loss  instead of all that: tokens, steps and seconds of whole runs to a validation loss,
                 or to the loss that the `first` of the configs has at the end of its budget
    configs      overrides of each   seeds   runs of each

All figures are in result.json of the run's folder. Each loop lives in processes of its own and
takes a few steps whenever it is its turn, so that what else happens on the machine meets all of
them alike. Ratios are taken within a round; only they carry over to another machine.
"""
