// Compiled without the instructions that the kernels need, so that it can be asked on any processor.

extern "C" int specplug_can_run() {
#ifdef SPECPLUG_HAS_KERNELS
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512bf16");
#else
  return 0;
#endif
}
