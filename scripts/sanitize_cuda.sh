#!/usr/bin/env bash
# sanitize_cuda.sh [OPTION…]: the tests of the CUDA kernels under compute-sanitizer, in parts that end within a minute each; a table at the
# end, and exit code 1 unless every part is clean. Build first: scripts/build.sh cuda test_cuda
#   --tools "racecheck memcheck synccheck"   which
#   --parts "codec split …"                  families of test_cuda (default: all that have kernels of their own; also: autograd train)
#   --filter PATTERN                         of tests, as gtest's
#   --logs FOLDER                            a log a part (default build/sanitize)
#   --timeout SECONDS                        a part (default 60)
#   --jobs N                                 parts at once on the one GPU (default 4)
#   --build FOLDER                           where the tests are (default build)
# Only Satchel's kernels are looked at, not torch's and cuBLAS's. What racecheck would take minutes for, large shapes, is left to the others.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
die() { echo "satchel: $*" >&2; exit 1; }
usage() { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' scripts/sanitize_cuda.sh; }

tools="racecheck memcheck synccheck" parts="codec low_pass norm_act norm_block norm_image product split"
filter='*' logs=build/sanitize timeout=60 jobs=4 build=build
while [[ $# -gt 0 ]]; do
  case $1 in
    --tools) tools=${2:?} ;;
    --parts) parts=${2:?} ;;
    --filter) filter=${2:?} ;;
    --logs) logs=${2:?} ;;
    --timeout) timeout=${2:?} ;;
    --jobs) jobs=${2:?} ;;
    --build) build=${2:?} ;;
    -h | --help) usage; exit 0 ;;
    *) usage >&2; die "unknown option $1" ;;
  esac
  shift 2
done
sanitizer=$(type -P compute-sanitizer "${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer" | head -1) || true
[[ -n "$sanitizer" ]] || die "compute-sanitizer is not on the PATH nor in CUDA_HOME or /usr/local/cuda; it is part of the CUDA toolkit"
for part in $parts; do [[ -x $build/test_cuda_$part ]] || die "$build/test_cuda_$part is missing; run: scripts/build.sh cuda test_cuda"; done

# Shards of a family under racecheck, which is the slowest, so that each ends in time; half as many under the others.
declare -A shards=([codec]=16 [low_pass]=12 [norm_act]=12 [norm_block]=9 [norm_image]=16 [product]=12 [split]=12 [autograd]=12 [train]=12)
huge='*MoreThanTwoToTheThirtyOneValues'
large="$huge:*ManyRows*:*LargeMaps*:*LongSumsAreNotCutOff:*ManyTilesOfColumns:*MoreTilesThanAGridHasRows"

# run_part TOOL PART SHARD SHARDS: its line of the table goes to a file beside its log.
run_part() {
  local tool=$1 part=$2 shard=$3 of=$4 without=$huge code=0 start=$SECONDS
  local name=$tool-$part-$((shard + 1)) log
  log=$logs/$name.log
  if [[ $tool == racecheck ]]; then without=$large; fi
  GTEST_TOTAL_SHARDS=$of GTEST_SHARD_INDEX=$shard timeout --kill-after=5 "$timeout" \
    "$sanitizer" --tool "$tool" --kernel-name kns=satchel --report-api-errors no --print-limit 20 --error-exitcode 99 \
    "$build/test_cuda_$part" --gtest_filter="$filter:-$without" >"$log" 2>&1 || code=$?
  local reports passed failed state=clean
  reports=$(grep -oP '(RACECHECK|ERROR) SUMMARY: \K[0-9]+' "$log" | awk '{sum += $1} END {if (NR) print sum}' || true)
  passed=$(grep -oP '\[  PASSED  \] \K[0-9]+' "$log" | tail -1 || true)
  failed=$(grep -oP '^ ?\K[0-9]+(?= FAILED TEST)' "$log" | tail -1 || true)
  if [[ $code == 124 || $code == 137 ]]; then state=TIMEOUT
  elif [[ -z "$reports" ]]; then state="NO SUMMARY"
  elif [[ "$reports" != 0 ]]; then state=REPORTS
  elif [[ $code != 0 ]]; then state="TESTS FAIL"; fi
  printf '%-10s %-12s %5s %7s %7s %8s %5ss  %s\n' "$tool" "$part" "$((shard + 1))/$of" "${passed:-?}" "${failed:-0}" "${reports:-?}" \
    $((SECONDS - start)) "$state" >"$logs/$name.line"
  cat "$logs/$name.line"
}

mkdir -p "$logs"
rm -f "$logs"/*.line "$logs"/*.log
head=$(printf '%-10s %-12s %5s %7s %7s %8s %6s  %s' tool part shard passed failed reports time state)
echo "$head"
for tool in $tools; do
  for part in $parts; do
    of=${shards[$part]:-4}
    if [[ $tool != racecheck ]]; then of=$((of / 2)); fi
    for ((shard = 0; shard < of; ++shard)); do
      while (($(jobs -rp | wc -l) >= jobs)); do wait -n || true; done
      run_part "$tool" "$part" "$shard" "$of" &
    done
  done
done
wait

echo
echo "$head" | tee "$logs/summary.txt"
sort "$logs"/*.line | tee -a "$logs/summary.txt"
dirty=$(cat "$logs"/*.line | grep -vc ' clean$' || true)
echo "$(cat "$logs"/*.line | wc -l) parts, $dirty not clean; logs are in $logs" | tee -a "$logs/summary.txt"
[[ $dirty == 0 ]]
