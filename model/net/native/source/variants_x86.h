// The variants of x86-64: included by kernels.h.
#pragma once
#include <sys/syscall.h>
#include <unistd.h>

#include "attention_tiles.h"
#include "avx.h"
#include "pairs.h"
#include "quantised_tiles.h"

VARIANT(avx2, OF(AVX2), eights, multiply_avx2, multiply_whole_avx2, round_avx2, tile_avx2)
VARIANT(avx512, OF(AVX512), floats, multiply_avx512, multiply_whole_avx512, round_avx512, tile_avx512)
static const Kernels avx2_vnni = with(avx2, multiply_avx2, multiply_whole_vnni256, round_vnni256, tile_avx2);
static const Kernels avx512_vnni = with(avx512, multiply_avx512, multiply_whole_vnni512, round_vnni512, tile_avx512);
static const Kernels avx512_bf16 = with(avx512, multiply_bf16, multiply_whole_vnni512, round_vnni512, attend_tile_pairs);
static const Kernels amx = with(avx512, multiply_tiles, multiply_whole_amx, round_vnni512, attend_tile_amx, LANES);

static const Kernels* const KERNELS[] = {&portable, &avx2, &avx2_vnni, &avx512, &avx512_vnni, &avx512_bf16, &amx};
enum { PORTABLE, WITH_AVX2, WITH_AVX2_VNNI, WITH_AVX512, WITH_AVX512_VNNI, WITH_AVX512_BF16, WITH_AMX };

OF(AMX) static void release_tiles() { _tile_release(); }

// Threads that have used tiles give them back, so that the kernel need not save them.
static void rest() {
    if (chosen == WITH_AMX) release_tiles();
}

// Intel's cores multiply pairs of bfloat16 once in two cycles, and float32 twice in one (measured on an Emerald Rapids).
static bool slower_than_before(int number) { return number == WITH_AVX512_BF16 && __builtin_cpu_is("intel"); }

#ifdef STAND_INS
static bool has(int) { return true; }
#else
static bool may_use_tiles() {  // the kernel gives the tiles' state only to those who ask (Linux 5.16)
    const int ARCH_REQ_XCOMP_PERM = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0;
}

// Whether this CPU has instruction set `number`, and with it all that its kernels use.
static bool has(int number) {
    __builtin_cpu_init();
    unsigned a = 7, b = 0, c = 0, d = 0, more = 7, b1 = 0, c1 = 1, d1 = 0;
    __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    __asm__("cpuid" : "+a"(more), "=b"(b1), "+c"(c1), "=d"(d1));
    switch (number) {
        case PORTABLE: return true;
        case WITH_AVX2: return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
        case WITH_AVX2_VNNI: return has(WITH_AVX2) && (more >> 4 & 1);
        case WITH_AVX512:
            return has(WITH_AVX2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                   __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512cd");
        case WITH_AVX512_VNNI: return has(WITH_AVX512) && __builtin_cpu_supports("avx512vnni");
        case WITH_AVX512_BF16: return has(WITH_AVX512_VNNI) && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi");
        case WITH_AMX: return has(WITH_AVX512_BF16) && (d >> 22 & 1) && (d >> 24 & 1) && (d >> 25 & 1) && may_use_tiles();
    }
    return false;
}
#endif
