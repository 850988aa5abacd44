#!/usr/bin/env bash
# From a fresh clone to a small trained model that writes text, with nothing to download but packages.
# Every step may be interrupted and run again: finished work is kept.
set -euo pipefail
cd "$(dirname "$0")/.."

# Two processes on the CPU, also where there is a GPU: the quickstart is the same on every machine.
export CUDA_VISIBLE_DEVICES=

RUN=runs/quickstart
PY=.venv/bin/python
begin=$SECONDS
step_number=0

explain_stop() {
    local status=$?
    local next="'make quickstart' goes on from there"
    # Wrong use will not right itself, such as a run folder that holds another run.
    [ "$status" -ne 2 ] || next="mend what the message above names; 'rm -r $RUN' starts afresh"
    [ "$status" -eq 0 ] || printf '\nquickstart stopped in step %d (status %d); %s\n' \
        "$step_number" "$status" "$next" >&2
}
trap explain_stop EXIT

step() {
    step_number=$((step_number + 1))
    local title=$1 start=$SECONDS
    shift
    printf '\n[%d/5] %s\n      $ %s\n' "$step_number" "$title" "$*"
    "$@"
    printf '      done in %d s\n' $((SECONDS - start))
}

step "The environment" sh scripts/setup.sh
step "Data and a tokenizer from Python's own standard library" \
    "$PY" tools/prepare_quickstart.py data/quickstart
step "Pretraining" bash launch/pretrain.sh configs/quickstart.yaml
step "Export to Hugging Face, compared logit by logit" \
    "$PY" tools/convert.py to-hf "$RUN" "$RUN/hf" --verify --force
step "A sample of what it has learned" "$PY" tools/generate.py "$RUN/hf" --prompt "def "

total=$((SECONDS - begin))
cat <<END

Quickstart finished in $((total / 60)) min $((total % 60)) s. Where to look next:
  .venv/bin/tensorboard --logdir $RUN/tensorboard     the curves
  $RUN/metrics.jsonl                                  the same numbers, a row per logged step
  $RUN/weight_decay.tsv                               what is decayed, parameter by parameter
  $RUN/hf                                             the model, for transformers' from_pretrained
  $PY tools/generate.py $RUN/hf --prompt "import "
END
