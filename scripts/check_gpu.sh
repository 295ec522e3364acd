#!/usr/bin/env bash
# Certifies, scores and tests this checkout on one GPU or several; a line per step says how it ended.
#   scripts/check_gpu.sh OUT [GPU]      OUT: a new folder for results and logs; GPU: index or UUID (default: 0), or several: 0,1
# Exit status: 0 when every step ended with 0, else 1. Environment variables:
MELTCORE="${MELTCORE:-}" # the program; unset: this checkout's .venv, else the one on PATH
PYTHON="${PYTHON:-}"     # its Python with pytest; unset likewise
TIER="${TIER:-standard}" # of the certificate

set -uo pipefail

out="${1:?usage: scripts/check_gpu.sh OUT [GPU]}"
[[ -e "$out" ]] && { echo "$out exists; name a new folder" >&2; exit 1; }
mkdir -p "$out"
out="$(cd "$out" && pwd)"
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
if [[ -z "$MELTCORE" ]]; then MELTCORE=.venv/bin/meltcore; [[ -x "$MELTCORE" ]] || MELTCORE=meltcore; fi
if [[ -z "$PYTHON" ]]; then PYTHON=.venv/bin/python; [[ -x "$PYTHON" ]] || PYTHON=python3; fi
export CUDA_VISIBLE_DEVICES="${2:-0}"

failed=0
step() { # NAME SECONDS COMMAND...: after the limit the command is interrupted, 30 s later killed
  local name="$1" limit="$2" status=0
  shift 2
  local run=(timeout --signal=INT --kill-after=30 "$limit" "$@")
  if [[ $name == snapshot ]]; then # its standard output is a document that reports read
    "${run[@]}" > "$out/$name.json" 2> "$out/$name.log" || status=$?
  else
    "${run[@]}" > "$out/$name.log" 2>&1 || status=$?
  fi
  [[ $status == 0 ]] || failed=1
  echo "$name: status $status ($out/$name.log)"
}

step snapshot 120 "$MELTCORE" snapshot --json
step certify 900 "$MELTCORE" certify --tier "$TIER" --out "$out"
# A report card takes the newest score of a folder: the main one last.
step bench-fp8 480 "$MELTCORE" bench --precision fp8 --out "$out"
step bench 480 "$MELTCORE" bench --out "$out"
step gpu-tests 1800 "$PYTHON" -m pytest -m gpu -rs
exit $failed
