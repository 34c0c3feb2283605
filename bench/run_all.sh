#!/usr/bin/env bash
# run_all.sh [OPTION…]: every benchmark behind docs/results.md, on this machine, from this commit; then the tables of docs/ anew.
#   --data DIR      prepared data sets (default build/bench_data): ogbn-arxiv-fastrp/, cifar-10/, cora.npz, amazon-computers.npz, coauthor-cs.npz,
#                   tolokers.npz; Fashion-MNIST is looked for in /usr/share/datasets/fashion-mnist. What is missing is left out, with a line
#   --only "NAME…"  some parts: plan codec graph bias small arxiv images gpu python (default: all)
#   --quick         the smallest sizes, to check this script; the tables are not written
#   --no-tables     measures only
# The parts plan, codec, graph, bias and small run on the CPU; arxiv, images, gpu and python need a GPU and are left out without one; python needs
# torchvision too, and scripts/build.sh cuda satchel_stable.
# Results: build/results/COMMIT/NAME.json and .log, and run.json with commit, date, machine and commands. Build first:
# scripts/build.sh release satchel_tool, or with a GPU scripts/build.sh cuda satchel_tool. SATCHEL=… is another binary.
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/setup.sh"

usage() { sed -n '2,/^source/{/^source/d;s/^# \{0,1\}//;p}' bench/run_all.sh; }

data=build/bench_data parts="plan codec graph bias small arxiv images gpu python" quick='' tables=yes
while [[ $# -gt 0 ]]; do
  case $1 in
    --data) data=${2:?}; shift ;;
    --only) parts=${2:?}; shift ;;
    --quick) quick=yes tables='' ;;
    --no-tables) tables='' ;;
    -h | --help) usage; exit 0 ;;
    *) usage >&2; die "unknown option $1" ;;
  esac
  shift
done

satchel=${SATCHEL:-build/bin/satchel}
[[ -x "$satchel" ]] || die "no $satchel; run: scripts/build.sh release satchel_tool"
commit=$(git rev-parse --short HEAD)
git diff --quiet HEAD -- || commit+=-changed
out=build/results/$commit${quick:+-quick}
mkdir -p "$out"
failed=()
gpu=''
if has_gpu; then gpu=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | head -1 | sed 's/,/, driver/'); fi

# about: run.json, with what has been run so far.
"$PYTHON" - "$out/run.json" "$commit" "$gpu" <<'PY'
import datetime, json, os, pathlib, re, sys
path, commit, gpu = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]
names = re.findall(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text()) or ["unknown CPU"]
commands = json.loads(path.read_text())["commands"] if path.exists() else {}
about = {"commit": commit, "date": datetime.date.today().isoformat(), "cpu": f"{names[0]}, {os.cpu_count()} cores", "gpu": gpu or "no GPU"}
path.write_text(json.dumps({**about, "commands": commands}, indent=2) + "\n")
PY

# record NAME COMMAND…: the command, as it is shown below a table.
record() {
  "$PYTHON" - "$out/run.json" "$@" <<'PY'
import json, pathlib, sys
path, name, command = pathlib.Path(sys.argv[1]), sys.argv[2], " ".join(f'"{a}"' if ";" in a else a for a in sys.argv[3:] if a)
about = json.loads(path.read_text())
about["commands"][name] = command
path.write_text(json.dumps(about, indent=2) + "\n")
PY
}

# measure NAME ARGUMENT…: `satchel ARGUMENT…` into NAME.json. Goes on where one fails; the exit code says so at the end.
measure() {
  local name=$1
  shift
  echo
  echo "$ satchel $*"
  rm -f "$out/$name.json"
  if "$satchel" "$@" --json "$out/$name.json" 2>&1 | tee "$out/$name.log"; then
    local shown=("${@#"$data/"}")  # the data set by its name
    record "$name" satchel "${shown[@]/#--quiet/}"
  else
    failed+=("$name")
  fi
}

wanted() { [[ " $parts " == *" $1 "* ]]; }
on_gpu() { [[ -n "$gpu" ]] || { say "no GPU: $1 is left out"; return 1; }; }
there() { [[ -e "$1" ]] || { say "$1 is missing: left out"; return 1; }; }

if wanted plan; then
  for name in arxiv products division; do measure "plan_$name" plan --table "$name" --method satchel; done
  measure plan_resnet50 plan --model resnet50 --batch 256
fi
if wanted codec; then measure codec_cpu bench codec ${quick:+--quick}; fi
if wanted graph; then
  if [[ -n $quick ]]; then measure graph_cpu bench graph --data synthetic:arxiv,scale=0.005 --steps 2; else measure graph_cpu bench graph; fi
fi
if wanted bias; then
  if [[ -n $quick ]]; then measure bias bench bias --nets batch-256 --seeds 10 --again 0; else measure bias bench bias; fi
  if [[ -n $quick ]]; then measure bias_pairs bench bias --nets pairs --loss squares --seeds 2 --again 0; else measure bias_pairs bench bias --nets pairs; fi
fi
if wanted small; then
  epochs=150 seeds=16
  if [[ -n $quick ]]; then epochs=2 seeds=2; fi
  for name in cora amazon-computers coauthor-cs tolokers; do
    there "$data/$name.npz" || continue
    for model in gcn sage; do
      measure "train_${name}_$model" train --data "$data/$name.npz" --model "$model" --layers 3 --hidden 64 --epochs "$epochs" \
        --eval-every 5 --method fp32,satchel --seeds "$seeds" --threads 1 --quiet
    done
  done
fi
if wanted arxiv && on_gpu arxiv && there "$data/ogbn-arxiv-fastrp"; then
  measure train_arxiv train --data "$data/ogbn-arxiv-fastrp" --method fp32,exact,blockwise,satchel --epochs 300 --eval-every 5 --clip 0.5 \
    --device cuda --seeds 8 --tf32 --quiet
fi
if wanted images && on_gpu images; then
  methods="fp32;actnn;division;satchel;satchel,mean_bits=2.25"
  recipe=(--model resnet18 --method "$methods" --seeds 5 --batch 250 --schedule onecycle --lr 0.2 --label-smoothing 0.1 --device cuda --tf32 --quiet)
  if there "$data/cifar-10"; then measure train_cifar10 train --data "$data/cifar-10" --epochs 5 "${recipe[@]}"; fi
  fashion=/usr/share/datasets/fashion-mnist
  if there "$fashion"; then measure train_fashion train --data "$fashion" --epochs 3 --width 32 "${recipe[@]}"; fi
fi
if wanted gpu && on_gpu gpu; then
  full=(--compile all --growth --products --images)
  if [[ -n $quick ]]; then full=(--compile none --hidden 128 --tf32 on --steps 3 --no-codec); fi
  echo
  echo "$ bench/run_cuda.sh ${full[*]}"
  if OUT="$out/gpu" bench/run_cuda.sh "${full[@]}" 2>&1 | tee "$out/run_cuda.log"; then :; else failed+=(gpu); fi
  record gpu/run_cuda bench/run_cuda.sh "${full[@]}"
  if [[ -n $tables ]]; then
    for picture in "$out"/gpu/*.svg; do [[ ! -e "docs/pictures/$(basename "$picture")" ]] || cp "$picture" docs/pictures/; done
  fi
fi

if wanted python && on_gpu python && there build/python/_satchel.so; then
  ours=packing,satchel,satchel+graph plain=eager,compile,compile+graph,budget:0.5,budget:0.25,budget:0.1,checkpoint,save_on_cpu
  if [[ -n $quick ]]; then ours=packing plain=eager; fi
  mkdir -p "$out/python"
  for model in gpt resnet50 vit_b_16 convnext_tiny; do
    ways=$plain,$ours
    if [[ $model == resnet50 && -z $quick ]]; then ways+=,convert,convert+graph; fi
    command=(bench/python_models.py "$model" --ways "$ways")
    echo
    echo "$ ${command[*]}"
    if PYTHONPATH=python SATCHEL_LIBRARY=$PWD/build/python/_satchel.so "$PYTHON" "${command[@]}" --json "$out/python/$model.json" 2>&1 |
      tee "$out/python_$model.log"; then record "python/$model" "${command[@]}"; else failed+=("python_$model"); fi
  done
  "$PYTHON" bench/picture.py --out "$out/python" "$out"/python/*.json
  if [[ -n $tables ]]; then
    for picture in "$out"/python/*.svg; do [[ ! -e "docs/pictures/$(basename "$picture")" ]] || cp "$picture" docs/pictures/; done
  fi
fi

echo
if [[ -n $tables ]]; then "$PYTHON" bench/tables.py "$out"; fi
echo "$out"
if [[ ${#failed[@]} -gt 0 ]]; then die "failed: ${failed[*]}"; fi
