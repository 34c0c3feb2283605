#!/usr/bin/env bash
# fuzz.sh [NAME…]: builds the fuzz targets and runs them (or those named) one after another, FUZZ_SECONDS (60) in all. What they have found
# stays as a file in build/fuzz/findings; inputs that reach new code stay in build/fuzz/corpus and are the next run's start.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
type -P clang++ >/dev/null || install_packages clang
type -P clang++ >/dev/null || die "clang++ is missing, which has libFuzzer; install clang"
scripts/build.sh fuzz

seconds=${FUZZ_SECONDS:-60}
[[ "$seconds" =~ ^[1-9][0-9]*$ ]] || die "FUZZ_SECONDS must be a whole number of seconds from 1 on, got '$seconds'"
names=("$@")
if [[ ${#names[@]} == 0 ]]; then mapfile -t names < <(cd build/fuzz/fuzzers && ls | sed 's/^fuzz_//'); fi
mkdir -p build/fuzz/findings build/fuzz/logs

failed=0 total=0
for i in "${!names[@]}"; do
  name=${names[$i]} log=build/fuzz/logs/${names[$i]}.log
  [[ -x build/fuzz/fuzzers/fuzz_$name ]] || die "there is no fuzz target '$name'"
  # Shares that add up to all the seconds, each at least 1.
  share=$((seconds * (i + 1) / ${#names[@]} - seconds * i / ${#names[@]}))
  mkdir -p "build/fuzz/corpus/$name"
  state=ok
  "build/fuzz/fuzzers/fuzz_$name" "build/fuzz/corpus/$name" -max_total_time=$((share > 0 ? share : 1)) -artifact_prefix="build/fuzz/findings/$name-" \
    -max_len=8192 -timeout=20 -rss_limit_mb=4096 -print_final_stats=1 -verbosity=1 >"$log" 2>&1 || state=FOUND
  if grep -q 'run interrupted' "$log"; then die "interrupted while $name ran"; fi
  runs=$(grep -oP 'stat::number_of_executed_units: \K\d+' "$log" || echo 0)
  total=$((total + runs))
  covered=$(grep -oP 'cov: \K\d+' "$log" | tail -1 || true)
  printf '%-16s %5s s %12s executions %7s edges  %s\n' "$name" "$share" "$runs" "${covered:-?}" "$state"
  if [[ $state == FOUND ]]; then
    failed=1
    grep -m 5 -E 'ERROR|SUMMARY|runtime error|broken promise|what\(\)|Test unit written' "$log" | sed 's/^/    /' || true
  fi
done
printf '%-16s %5s s %12s executions\n' "all" "$seconds" "$total"
[[ $failed == 0 ]] || die "findings are in build/fuzz/findings; run build/fuzz/fuzzers/fuzz_NAME FILE to see one"
