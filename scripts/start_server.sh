#!/usr/bin/env bash
# Start a server in the background, wait until it is ready, and leave it running: exit 0 means that it answers.
# `meltcore stop --port PORT` ends it. Arguments go on to `meltcore serve`. From the environment:
MODEL="${MODEL:-Qwen/Qwen3.5-35B-A3B}"     # a checkpoint folder, a hub id, or meltcore/sums (bundled, for a try)
NAME="${NAME:-Qwen/Qwen3.5-35B-A3B}"       # what clients call it
HOST="${HOST:-127.0.0.1}"                  # 0.0.0.0 lets other machines ask
PORT="${PORT:-8000}"
TP="${TP:-}"                               # GPUs that share one replica: 1, 2, 4 or 8; unset: as many of these as there
                                           # are: all of CUDA_VISIBLE_DEVICES, where set, else all that nvidia-smi lists
DP="${DP:-1}"                              # replicas, each on TP GPUs of its own
LOAD_FORMAT="${LOAD_FORMAT:-auto}"         # dummy: random weights, nothing but a configuration is needed
LOG="${LOG:-}"                             # the server's output; unset: a file of its own, which is printed
START_TIMEOUT="${START_TIMEOUT:-900}"      # seconds until it must be ready; then it is ended, and we fail
MELTCORE="${MELTCORE:-}"                   # the program; unset: this checkout's .venv, else the one on PATH

set -euo pipefail

if [[ -z "$MELTCORE" ]]; then
  MELTCORE="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.venv/bin/meltcore"
  [[ -x "$MELTCORE" ]] || MELTCORE=meltcore
fi

if [[ -z "$TP" ]]; then
  gpus=0
  if [[ -n "${CUDA_VISIBLE_DEVICES+set}" ]]; then
    IFS=', ' read -ra visible <<< "$CUDA_VISIBLE_DEVICES"
    for gpu in "${visible[@]}"; do
      [[ "$gpu" =~ ^([0-9]|GPU-|MIG-) ]] || break # as CUDA does: from -1 or NoDevFiles on there is none
      gpus=$((gpus + 1))
    done
  elif command -v nvidia-smi > /dev/null; then
    gpus="$(nvidia-smi --list-gpus 2> /dev/null | grep --count '^GPU' || true)"
  fi
  TP=1
  while [[ "$DP" =~ ^[1-9][0-9]*$ ]] && ((TP < 8 && 2 * TP * DP <= gpus)); do # else it is for meltcore to refuse
    TP=$((2 * TP))
  done
fi

options=(--served-model-name "$NAME" --host "$HOST" --port "$PORT" --load-format "$LOAD_FORMAT" --dp "$DP")
if [[ "$TP" != 1 ]]; then
  options+=(--tp "$TP")
fi
if [[ -n "$LOG" ]]; then
  options+=(--log "$LOG")
fi
exec "$MELTCORE" serve "$MODEL" "${options[@]}" --daemon --start-timeout "$START_TIMEOUT" "$@"
