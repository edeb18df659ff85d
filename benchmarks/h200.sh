#!/usr/bin/env bash
# The kernel figures of one GPU host, each stage within a few minutes and by itself:
#
#   benchmarks/h200.sh small     a probe of the base grid in one process, then the bench of it in another: is all well?
#   benchmarks/h200.sh full      the same for the whole grid                              -> h200-attention.json
#   benchmarks/h200.sh torch     prefill with torch's kernels alone                       -> h200-attention-torch.json
#   benchmarks/h200.sh sm80      decode, emulated Ampere                                  -> h200-attention-sm80-emulated.json
#   benchmarks/h200.sh probes    full grids of DeepSeek-V2-Lite and -V3 at TP 8, timed    -> h200-probes.json, tables/nvidia-h200.json
#   benchmarks/h200.sh verdicts  every target from those files, met or missed
#
# Results go to $OUT (default build/h200). Run `full` before `probes`, so that kernels are compiled. Then copy the JSON files to
# benchmarks/results, tables/nvidia-h200.json to mla_serve/tables, and run benchmarks/kernels_doc.py.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-build/h200} python=${PYTHON:-python3} peers=benchmarks/peers failed=0
mkdir -p "$out"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

# step NAME SECONDS COMMAND...: the command's output in the log, its time and last words here
step() {
  local name=$1 seconds=$2 began=$SECONDS status=0
  shift 2
  timeout -k 10 "$seconds" "$@" >"$out/$name.txt" 2>"$out/$name.log" || status=$?
  echo "$name: exit status $status after $((SECONDS - began)) s"
  [ "$status" = 0 ] || { failed=1; tail -n 8 "$out/$name.log"; }
}

bench() { "$python" -m mla_serve.cli bench attention "$@"; }
export -f bench
export python

stage() {
  case $1 in
  small)
    step small-decisions 200 "$python" -m mla_serve.cli probe --grid small --budget 180 --out "$out/small-decisions.json"
    step small 150 bash -c 'bench "$@"' - --grid small --peers $peers --decisions "$out/small-decisions.json" --budget 130 \
      --out "$out/h200-attention-small.json" ;;
  full)
    step full-decisions 240 "$python" -m mla_serve.cli probe --grid full --budget 220 --out "$out/full-decisions.json"
    step full 330 bash -c 'bench "$@"' - --grid full --peers $peers --decisions "$out/full-decisions.json" --budget 300 \
      --out "$out/h200-attention.json" ;;
  torch)
    step torch-decisions 60 bash -c 'bench "$@"' - --grid prefill --only 'torch-*' --write-decisions "$out/torch-decisions.json"
    step torch 60 bash -c 'bench "$@"' - --grid prefill --only 'torch-*' --decisions "$out/torch-decisions.json" \
      --out "$out/h200-attention-torch.json" ;;
  sm80)
    step sm80-decisions 120 bash -c 'bench "$@"' - --grid decode --emulate sm80 --write-decisions "$out/sm80-decisions.json"
    step sm80 120 bash -c 'bench "$@"' - --grid decode --emulate sm80 --peers $peers --decisions "$out/sm80-decisions.json" \
      --budget 100 --out "$out/h200-attention-sm80-emulated.json" ;;
  probes)
    step probes 420 "$python" benchmarks/h200_probes.py --out "$out" --timeout 200
    cat "$out/probes.log" | tail -n 3 ;;
  verdicts)
    "$python" benchmarks/verdicts.py "$out/h200-attention.json" --torch "$out/h200-attention-torch.json" \
      --emulated "$out/h200-attention-sm80-emulated.json" --probes "$out/h200-probes.json" || true ;;
  *) sed -n '2,13s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
  esac
}

[ $# -gt 0 ] || stage help
for name in "$@"; do stage "$name"; done
exit $failed
