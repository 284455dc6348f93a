#!/usr/bin/env bash
# Runs each case of cases.txt (name|GPUs|options): six steps with validation, sample and save.
# usage, from the project's root: tests/tools/cuda_stub/run_cases.sh ENV [NAME ...]
# ENV is an environment of build.sh. Exit code 1 if a case fails.
here=$(cd "$(dirname "$0")" && pwd) env=$1 failed=0 out=$(mktemp -d)
shift
train() { # <name> <GPUs> <options>
    STUB_GPUS=$2 timeout "${CASE_S:-200}" "$here/run.sh" "$env" python train.py model=llama_nano \
        model.max_seq_len=128 data=text "data.pattern=*.py" data.batch_size=8 data.seq_len=128 \
        trainer=gpu trainer.devices="$2" trainer.val_check_interval=3 trainer.limit_val_batches=3 \
        trainer.log_every_n_steps=2 trainer.max_steps=6 callbacks.sample.n_tokens=5 \
        model.compile=none strategy.timeout_s=60 run_dir="$out/$1" $3 >"$out/$1.log" 2>&1 </dev/null
}
while IFS='|' read -r name gpus options; do
    [ $# = 0 ] || [[ " $* " == *" $name "* ]] || continue
    # A value that no kernel has written may be garbage, and end the run by chance: try twice.
    if train "$name" "$gpus" "$options" || { rm -rf "${out:?}/$name" && train "$name" "$gpus" "$options"; }; then
        echo "$name: passed"
    else
        failed=1
        echo "$name: FAILED"
        grep -aE '^error|Error' "$out/$name.log" | tail -3 | cut -c1-300
    fi
done <"$here/cases.txt"
echo "logs: $out"
exit $failed
