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
# A part is a shard of a family's tests or, of a test that racecheck takes longer for, a share of its cases; its name in the table and its
# log's tell which. Only Satchel's kernels are looked at, not torch's and cuBLAS's. What racecheck would take minutes for, large shapes, is
# left to the others.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
die() { echo "satchel: $*" >&2; exit 1; }
usage() { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' scripts/sanitize_cuda.sh; }

tools="racecheck memcheck synccheck" parts="codec low_pass norm_act norm_block norm_image product row_norm split"
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
unset SATCHEL_TEST_CASES GTEST_TOTAL_SHARDS GTEST_SHARD_INDEX  # every part has its own

# Shards of a family under racecheck, which is the slowest and has the long tests apart, and under the others; never more than tests.
declare -A race_shards=([codec]=9 [low_pass]=6 [norm_act]=8 [norm_block]=2 [norm_image]=3 [row_norm]=4 [product]=6 [split]=3 [autograd]=12 [train]=12)
declare -A shards=([codec]=8 [low_pass]=6 [norm_act]=6 [norm_block]=4 [norm_image]=8 [row_norm]=3 [product]=6 [split]=6 [autograd]=6 [train]=6)
huge='*MoreThanTwoToTheThirtyOneValues'
large="$huge:*ManyRows*:*LargeMaps*:*LongSumsAreNotCutOff:*ManyTilesOfColumns:*MoreTilesThanAGridHasRows"

# Tests that are too long for a part under racecheck, and how many processes share one: each takes every n-th of its cases (mine() in
# tests/cuda/cuda_fixture.h). Where n and the length of an inner loop have a common divisor, one process gets all that is large in that
# loop and another none, so n is a prime that divides no length; of a single loop, each process has one case.
declare -A long=(
  [Cuda.MixedBytesAreTheCpus]=43
  [Cuda.EveryBitsBlockLevelsHeader]=7
  [Cuda.TheCurrentStreamIsUsed]=5
  [Cuda.ProductByStretchesOfRows]=8
  [LowPassLastCuda.EverySpec]=11
  [LowPassLastCuda.SamplesAreSlicesOfTheWhole]=5
  [NormLowPassCuda.SavesAndGradientsOfEveryMap]=11
  [Cuda.ChainGivesTheBitsOfTheCpu]=13
  [Cuda.F16NormActIsFloat32sRounded]=3
  [Cuda.NormActKeepsTheBytesOfTheUnfusedPath]=7
  [Cuda.NormActRebuildsTheNextInput]=5
  [Cuda.NormActGradients]=3
  [Cuda.NormBlockKeepsTheBytesOfTheUnfusedPath]=11
  [Cuda.NormBlockGradients]=13
  [Cuda.NormAddKeepsTheBytesOfTheUnfusedPath]=13
  [Cuda.NormAddGradients]=13
  [Cuda.NormImageKeepsTheBytesOfTheUnfusedPath]=11
  [Cuda.NormImageGradients]=13
  [Cuda.MaxPoolIsTorchs]=5
  [Cuda.NormActProductIsThatOfTheDecodedRows]=29
  [Cuda.NormActProductGoesRoundItsBuffers]=8
  [Cuda.NormActProductPicksRowsToTheBit]=13
  [Cuda.NormActProductTakesRowsAsTheyStand]=17
  [Cuda.ProductFromTheCodes]=11
  [SplitProduct.RowsAreRightWithinRounding]=23
  [SplitProduct.GradientsAreRightWithinRounding]=23
  [SplitProduct.StepsOfGraphLayersAreRightWithinRounding]=5
)

# without TOOL: the tests that its shards leave out.
without() {
  if [[ $1 == racecheck ]]; then (IFS=: && echo "$large:${!long[*]}"); else echo "$huge"; fi
}

# fits NAME PATTERNS: whether a test's name is one of gtest's patterns.
fits() {
  local pattern
  local -a patterns
  IFS=: read -ra patterns <<<"$2"
  # shellcheck disable=SC2053  # a pattern, not a string
  for pattern in "${patterns[@]}"; do if [[ $1 == $pattern ]]; then return 0; fi; done
  return 1
}

# run_part TOOL FAMILY TEST NUMBER OF: a share of one test's cases or, where TEST is empty, a shard of all but $left_out. Its line of the
# table goes to a file beside its log.
run_part() {
  local tool=$1 part=$2${3:+-${3#*.}} test=$3 number=$4 of=$5 picked=$3 code=0 start=$SECONDS
  local name=$tool-$part-$number log
  log=$logs/$name.log
  local -a share=("SATCHEL_TEST_CASES=$number/$of")
  if [[ -z "$test" ]]; then
    share=("GTEST_TOTAL_SHARDS=$of" "GTEST_SHARD_INDEX=$((number - 1))")
    # What follows the first minus is left out.
    if [[ $filter == *-* ]]; then picked=$filter:$left_out; else picked=$filter:-$left_out; fi
  fi
  env "${share[@]}" timeout --kill-after=5 "$timeout" \
    "$sanitizer" --tool "$tool" --kernel-name kns=satchel --report-api-errors no --print-limit 20 --error-exitcode 99 \
    "$build/test_cuda_$2" --gtest_filter="$picked" >"$log" 2>&1 || code=$?
  local reports passed failed state=clean
  reports=$(grep -oP '(RACECHECK|ERROR) SUMMARY: \K[0-9]+' "$log" | awk '{sum += $1} END {if (NR) print sum}' || true)
  passed=$(grep -oP '\[  PASSED  \] \K[0-9]+' "$log" | tail -1 || true)
  failed=$(grep -oP '^ ?\K[0-9]+(?= FAILED TEST)' "$log" | tail -1 || true)
  if [[ $code == 124 || $code == 137 ]]; then state=TIMEOUT
  elif [[ -z "$reports" ]] && grep -q '^\[==========\] 0 tests .* ran' "$log"; then state="0 tests, clean"  # and no kernel to sum up
  elif [[ -z "$reports" ]]; then state="NO SUMMARY"
  elif [[ "$reports" != 0 ]]; then state=REPORTS
  elif [[ $code != 0 ]]; then state="TESTS FAIL"; fi
  line "$tool" "$part" "$number/$of" "${passed:-?}" "${failed:-0}" "${reports:-?}" "$((SECONDS - start))s" "$state" >"$logs/$name.line"
  cat "$logs/$name.line"
}
line() { printf '%-10s %-49s %5s %7s %7s %8s %6s  %s\n' "$@"; }

# start_part …: run_part when it is its turn.
started=0
start_part() {
  started=$((started + 1))
  while (($(jobs -rp | wc -l) >= jobs)); do wait -n || true; done
  run_part "$@" &
}

mkdir -p "$logs"
rm -f "$logs"/*.line "$logs"/*.log
declare -A tests=()  # of a family, those that --filter picks
for part in $parts; do
  list=$("$build/test_cuda_$part" --gtest_list_tests --gtest_filter="$filter") || die "$build/test_cuda_$part does not list its tests"
  tests[$part]=$(awk '/^ / {print suite $1} /^[^ ]+\./ {suite = $1}' <<<"$list")
done

head=$(line tool part shard passed failed reports time state)
echo "$head"
for tool in $tools; do
  left_out=$(without "$tool")
  for part in $parts; do
    of=${shards[$part]:-2} count=0 apart=()
    if [[ $tool == racecheck ]]; then of=${race_shards[$part]:-4}; fi
    for test in ${tests[$part]}; do
      if ! fits "$test" "$left_out"; then count=$((count + 1))
      elif [[ $tool == racecheck && -n "${long[$test]:-}" ]]; then apart+=("$test"); fi
    done
    if ((of > count)); then of=$count; fi
    for ((number = 1; number <= of; ++number)); do start_part "$tool" "$part" "" "$number" "$of"; done
    for test in "${apart[@]}"; do
      of=${long[$test]}
      for ((number = 1; number <= of; ++number)); do start_part "$tool" "$part" "$test" "$number" "$of"; done
    done
  done
done
wait
((started > 0)) || die "$tools of $parts: no test is called $filter"

echo
echo "$head" | tee "$logs/summary.txt"
sort "$logs"/*.line | tee -a "$logs/summary.txt"
dirty=$(cat "$logs"/*.line | grep -vc ' clean$' || true)
echo "$(cat "$logs"/*.line | wc -l) parts, $dirty not clean; logs are in $logs" | tee -a "$logs/summary.txt"
[[ $dirty == 0 ]]
