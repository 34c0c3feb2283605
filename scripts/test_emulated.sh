#!/usr/bin/env bash
# test_emulated.sh: the CUDA kernels, and then the library's way on CUDA, where there is no GPU; build.sh release test_emulation
# test_emulated_cuda has built them (the latter is not there where the library has CUDA). Prints tests only where one of a process fails.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

# Not of test_emulated_cuda: what takes minutes in an emulation, …
left_out=CudaGradients.AreRightOnAverage:CudaGradients.ByPartsOfTheBatch*:Cuda.NormActProductOfManyRows:Cuda.MlpBytes*
left_out+=:ImageTrainCuda.*:SegmentCuda.EveryMethod*:DetectCuda.EveryMethod*:Cuda.MeasuresWhatThePlanPredictsOfLargeTensors
# … what captures graphs or caps memory, …
left_out+=:Cuda.*Replay*:Cuda.*Graph*:Cuda.TheLastLayerGivesTrainingNodesAlone:Cuda.Tf32*:Cuda.BeyondFloat16TheRunEnds:Cuda.ACap*
# … and what asks how torch's own functions are on CUDA: which attention and RMS norm it has, float32 sums of bf16, which NaN comes out.
left_out+=:*/query:*/key:*/value:*/output:PackingCuda.PacksTheFusedRmsNorm:Cuda.Bf16GradientsAreTheExactOnes*:Cuda.NormAddShowsWhatIsNotANumber

logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
export OMP_NUM_THREADS=1 GTEST_TOTAL_SHARDS=$JOBS GTEST_BRIEF=1
export SATCHEL_TEST_CASES=1/7  # of long loops in test_emulated_cuda every seventh case: lengths of inner loops are no multiples of 7
running=()
for ((shard = 0; shard < JOBS; ++shard)); do
  for program in test_emulation "test_emulated_cuda --gtest_filter=-$left_out"; do
    [[ $program != test_emulated_cuda* || -x build/test_emulated_cuda ]] || continue
    GTEST_SHARD_INDEX=$shard build/$program || touch "$logs/failed"
  done >"$logs/$shard" 2>&1 &
  running+=($!)
done
wait "${running[@]}"
if [[ -e "$logs/failed" ]]; then
  cat "$logs"/[0-9]*
  die "tests on an emulated GPU failed (above)"
fi
cat "$logs"/[0-9]* | sed -nE 's/^\[  PASSED  \] ([0-9]+) tests?\.$/\1/p' | awk '{n += $1} END {print n " tests on an emulated GPU passed"}'
