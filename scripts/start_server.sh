#!/usr/bin/env bash
# Starts a server in the background and waits until it is ready: exit status 0 means that it answers.
# `meltcore stop --port PORT` ends it. Arguments are passed to `meltcore serve`. Environment variables:
MODEL="${MODEL:-${HACKATHON_MODEL_ID:-Qwen/Qwen3.5-35B-A3B}}" # a checkpoint folder, a hub id, or meltcore/sums (bundled)
NAME="${NAME:-}"                           # the model's name in the API; unset: MODEL, for a folder Qwen/Qwen3.5-35B-A3B
HOST="${HOST:-127.0.0.1}"                  # 0.0.0.0 accepts other machines
PORT="${PORT:-8000}"
TP="${TP:-}"                               # GPUs per replica: 1, 2, 4 or 8; unset: the most that are visible, in
                                           # CUDA_VISIBLE_DEVICES if set, else to nvidia-smi
DP="${DP:-${HACKATHON_DATA_PARALLEL_REPLICAS:-1}}" # replicas, each on TP GPUs of its own
LOAD_FORMAT="${LOAD_FORMAT:-auto}"         # dummy: random weights; only a configuration is needed
LOG="${LOG:-}"                             # the server's output; unset: a new file, which is printed
START_TIMEOUT="${START_TIMEOUT:-900}"      # seconds until it must be ready, else it is ended
MELTCORE="${MELTCORE:-}"                   # the program; unset: this checkout's .venv, else the one on PATH
# Aliases, as the hackathon's start scripts name them; a variable above wins:
#   HACKATHON_MODEL_ID  MODEL           HACKATHON_DATA_PARALLEL_REPLICAS  DP
#   HACKATHON_DEVICE    --device        HACKATHON_BATCH_MAX_SIZE          --max-num-seqs
#   HACKATHON_DTYPE     --dtype         HACKATHON_MAX_PENDING_REQUESTS    --max-queue
# Any other HACKATHON_* variable is named on standard error: it sets up what this server does not have.

set -euo pipefail

if [[ -z "$MELTCORE" ]]; then
  MELTCORE="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.venv/bin/meltcore"
  [[ -x "$MELTCORE" ]] || MELTCORE=meltcore
fi

if [[ -z "$NAME" ]]; then
  NAME="$MODEL"
  [[ ! -d "$MODEL" ]] || NAME=Qwen/Qwen3.5-35B-A3B
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

options=(--served-model-name "$NAME" --host "$HOST" --port "$PORT" --load-format "$LOAD_FORMAT"
  --data-parallel-size "$DP")
if [[ "$TP" != 1 ]]; then
  options+=(--tensor-parallel-size "$TP")
fi
if [[ -n "$LOG" ]]; then
  options+=(--log "$LOG")
fi
for variable in "${!HACKATHON_@}"; do
  value="${!variable}"
  [[ -n "$value" ]] || continue
  case "$variable" in
    HACKATHON_MODEL_ID | HACKATHON_DATA_PARALLEL_REPLICAS) ;; # read above
    HACKATHON_DEVICE) options+=(--device "$value") ;;
    HACKATHON_DTYPE) options+=(--dtype "$value") ;;
    HACKATHON_BATCH_MAX_SIZE) options+=(--max-num-seqs "$value") ;;
    HACKATHON_MAX_PENDING_REQUESTS) options+=(--max-queue "$value") ;;
    *) echo "start_server.sh: $variable=$value has no counterpart here" >&2 ;;
  esac
done
exec "$MELTCORE" serve "$MODEL" "${options[@]}" --daemon --start-timeout "$START_TIMEOUT" "$@"
