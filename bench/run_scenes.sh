#!/usr/bin/env bash
# run_scenes.sh [OPTION…]: segmentation and detection on a GPU, from drawn scenes: a step of each method beside torch's own, and the accuracy
# of 5 seeds. About four minutes on an H200.
#   --no-steps       leaves the steps out
#   --no-accuracy    leaves the accuracy out
#   --device NAME    default cuda; with cpu everything is small
# Results go to $OUT (default build/bench): scenes_*.json, and scenes_accuracy.md by bench/paired.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
die() { echo "satchel: $*" >&2; exit 1; }

steps=yes accuracy=yes device=cuda
while [[ $# -gt 0 ]]; do
  case $1 in
    --no-steps) steps='' ;;
    --no-accuracy) accuracy='' ;;
    --device) device=${2:?}; shift ;;
    *) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' bench/run_scenes.sh >&2; die "unknown option $1" ;;
  esac
  shift
done

out=${OUT:-build/bench}
satchel=${SATCHEL:-build/bin/satchel}
mkdir -p "$out"
rm -f "$out"/scenes_*
seeds=5 where=(--device "$device") threads=()
fcn_step=(--batch 16 --image 512) boxes_step=(--batch 16 --image 640)
fcn_data=count=3200,size=64,shapes=4,classes=2,test=256 fcn=(--width 16 --batch 32 --epochs 8 --lr 0.1)
boxes_data=count=1920,size=128,shapes=3,classes=2,test=256 boxes=(--width 16 --batch 16 --epochs 4 --lr 0.02)
if [[ $device == cpu ]]; then  # shows that everything runs
  seeds=3 threads=(--threads 1)
  fcn_step=(--batch 2 --image 64 --width 8) boxes_step=(--batch 2 --image 64 --width 8)
  fcn_data=count=16,size=32,shapes=2,classes=2,test=4 fcn=(--width 4 --batch 8 --epochs 1 --lr 0.1)
  boxes_data=count=16,size=64,shapes=2,classes=2,test=4 boxes=(--width 4 --batch 8 --epochs 1 --lr 0.02)
else
  where+=(--tf32)
fi

if [[ -n $steps ]]; then
  "$satchel" bench images --model fcn_resnet50 "${fcn_step[@]}" "${where[@]}" "${threads[@]}" --methods fp32,actnn,division,satchel --steps 10 --json "$out/scenes_fcn.json"
  "$satchel" bench detection "${boxes_step[@]}" "${where[@]}" "${threads[@]}" --methods fp32,actnn,division,satchel --steps 10 --json "$out/scenes_retinanet.json"
fi

# Methods, and halves of the detectors' seeds, beside one another: small models leave most of a GPU idle. Scored after the last epoch.
if [[ -n $accuracy ]]; then
  failed=0 pids=()
  # train NAME SEED COUNT OPTION…: into scenes_NAME_METHOD_SEED.json.
  train() {
    local to="$out/scenes_$1_${method}_$2" seed=$2 count=$3
    shift 3
    local command=("$satchel" train "$@" "${where[@]}" "${threads[@]}" --loaders 1 --no-augment --method "$method" --seed "$seed" --seeds "$count" --eval-every 100 --json "$to.json")
    if [[ $device == cpu ]]; then
      "${command[@]}" > "$to.txt" 2>&1 || failed=1
    else
      "${command[@]}" > "$to.txt" 2>&1 &
      pids+=($!)
    fi
  }
  half=$(((seeds + 1) / 2))
  for method in fp32 actnn division satchel; do
    train fcn 0 "$seeds" --data "synthetic-shapes:$fcn_data" --model fcn_resnet50 "${fcn[@]}" --no-aux --class-weights 0.3,1,1
    train boxes 0 "$half" --data "synthetic-shapes:$boxes_data" --model retinanet_resnet50_fpn "${boxes[@]}"
    train boxes "$half" $((seeds - half)) --data "synthetic-shapes:$boxes_data" --model retinanet_resnet50_fpn "${boxes[@]}"
  done
  for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
  if [[ $failed == 1 ]]; then
    grep "^satchel: " "$out"/scenes_*.txt >&2 || true
    die "a run did not end"
  fi
  bench/paired.py "$out"/scenes_fcn_*_*.json "$out"/scenes_boxes_*_*.json | tee "$out/scenes_accuracy.md"
fi
