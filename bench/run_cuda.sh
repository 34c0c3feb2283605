#!/usr/bin/env bash
# run_cuda.sh [OPTION…]: everything that the GPU's results come from, in one go. `make bench-cuda` builds first.
#   --compile tf32|all|none  where torch.compile's budgets are measured: about half a minute each (default: with TF32 only)
#   --hidden "128 256"       widths between layers
#   --tf32 "off on"          products of float32 matrices in TF32, for both sides alike
#   --steps N                timed steps of which the median counts (default 40)
#   --growth                 ten times the nodes and edges too
#   --products               a products-shaped graph under a cap of 12 GB too; takes minutes to generate
#   --images                 ResNet-50 at batch 256 too, beside torchvision's: TF32 and bf16 autocast, and the largest batch in 16 GB
#   --no-codec               leaves the codec's own benchmark out
# Results go to $OUT (default build/bench): a JSON a run, and results.json, results.md and the pictures made of them.
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/setup.sh"

usage() { sed -n '2,/^source/{/^source/d;s/^# \{0,1\}//;p}' bench/run_cuda.sh; }

compile=tf32 widths="128 256" modes="off on" steps=40 growth='' products='' images='' codec=yes
while [[ $# -gt 0 ]]; do
  case $1 in
    --compile) compile=${2:?}; shift ;;
    --hidden) widths=${2:?}; shift ;;
    --tf32) modes=${2:?}; shift ;;
    --steps) steps=${2:?}; shift ;;
    --growth) growth=yes ;;
    --products) products=yes ;;
    --images) images=yes ;;
    --no-codec) codec='' ;;
    -h | --help) usage; exit 0 ;;
    *) usage >&2; die "unknown option $1" ;;
  esac
  shift
done
case $compile in tf32 | all | none) ;; *) die "--compile must be tf32, all or none, got $compile" ;; esac

out=${OUT:-build/bench}
data=build/bench_data
satchel=build/bin/satchel
methods=fp32,exact,blockwise,satchel,satchel,bits=32
failed=()
declare -A some=([128]=17MiB [256]=36MiB)
mkdir -p "$out" "$data"
rm -f "$out"/satchel_*.json "$out"/torch_*.json "$out"/results.* "$out"/*.svg  # of a run before this

# run COMMAND…: goes on where one measurement fails; the exit code says so at the end.
run() {
  echo
  echo "$ $*"
  "$@" || failed+=("$*")
}

# bench NAME OPTION…: one `satchel bench graph` into satchel_NAME.json.
bench() {
  local name=$1
  shift
  run "$satchel" bench graph --device cuda --steps "$steps" "$@" --json "$out/satchel_$name.json"
}

# baselines NAME OPTION…: one graph_torch.py into torch_NAME.json.
baselines() {
  local name=$1
  shift
  run "$PYTHON" bench/graph_torch.py --steps "$steps" "$@" --json "$out/torch_$name.json"
}

# setting HIDDEN on|off: all methods and baselines of one picture.
setting() {
  local hidden=$1 tf32=() name=h$1_tf32_$2 only=eager
  if [[ $2 == on ]]; then tf32=(--tf32); fi
  if [[ $compile == all || ($compile == tf32 && $2 == on) ]]; then only=all; fi
  local shape=(--data "$data/arxiv" --hidden "$hidden" "${tf32[@]}")
  bench "$name" "${shape[@]}" --methods "$methods" --no-cuda-graph
  bench "${name}_graph" "${shape[@]}" --methods "exact;blockwise;satchel" --cuda-graph --no-torch
  bench "${name}_training_graph" "${shape[@]}" --methods satchel --last-layer training --cuda-graph --no-torch
  bench "${name}_no_cache_graph" "${shape[@]}" --methods satchel --no-cache --cuda-graph --no-torch
  if [[ $2 == on ]]; then  # float32 between layers, where the rows above have float16
    bench "${name}_none_graph" "${shape[@]}" --methods satchel --amp none --cuda-graph --no-torch
  else  # as much of A·X as leaves the peak below a quarter of PyTorch's
    bench "${name}_some_cache_graph" "${shape[@]}" --methods satchel --cache "${some[$hidden]:-36MiB}" --cuda-graph --no-torch
  fi
  bench "${name}_bf16" "${shape[@]}" --methods fp32,satchel --amp bf16 --no-cuda-graph
  bench "${name}_bf16_graph" "${shape[@]}" --methods satchel --amp bf16 --cuda-graph --no-torch
  baselines "$name" "${shape[@]}" --only "$only"
}

if [[ -n $codec ]]; then run "$satchel" bench codec --device cuda --json "$out/codec.json"; fi
run "$satchel" bench spmm --json "$out/spmm.json"
run "$satchel" bench product --json "$out/product.json"
"$satchel" data --data synthetic:arxiv --out "$data/arxiv" --overwrite
for hidden in $widths; do
  for mode in $modes; do setting "$hidden" "$mode"; done
done
if [[ -n $growth ]]; then
  bench growth --data synthetic:arxiv,scale=10 --hidden 128 --methods satchel --no-cuda-graph
fi
if [[ -n $products ]]; then
  "$satchel" data --data synthetic:nodes=2449029,edges=61859140,features=100,classes=47 --out "$data/products" --overwrite
  shape=(--data "$data/products" --hidden 256 --tf32)
  bench products "${shape[@]}" --memory-cap 12GB --methods "$methods" --no-cuda-graph
  bench products_no_cache "${shape[@]}" --memory-cap 12GB --methods satchel --no-cache --no-torch --no-cuda-graph
  baselines products "${shape[@]}" --memory-cap 12 --only eager
fi

if [[ -n $images ]]; then
  only=eager
  if [[ $compile != none ]]; then only=all; fi
  for types in "--tf32" "--amp bf16"; do
    read -ra options <<<"--model resnet50 --batch 256 $types"
    name=images_${types##*[- ]}
    run "$satchel" bench images --device cuda --steps "$steps" "${options[@]}" --methods "fp32;actnn;actnn,adaptive=no;division;satchel;satchel,norm_bits=1;satchel,mean_bits=2.25" \
      --json "$out/satchel_$name.json"
    run "$PYTHON" bench/image_torch.py --steps "$steps" "${options[@]}" --only "$only" --json "$out/torch_$name.json"
  done
  run "$satchel" bench batch --model resnet50 --device cuda --tf32 --memory-cap 16GB --no-tries --multiple 16 --steps 1 --json "$out/batch.json"
fi

echo
shopt -s nullglob
"$PYTHON" bench/picture.py --out "$out" "$out"/satchel_*.json "$out"/torch_*.json
if [[ ${#failed[@]} -gt 0 ]]; then
  printf 'satchel: failed: %s\n' "${failed[@]}" >&2
  exit 1
fi
