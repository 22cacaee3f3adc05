// The variants of arm64: included by kernels.h.
#pragma once
#include <sys/auxv.h>

#include "neon.h"

VARIANT(neon, OF(DOTPROD), fours, multiply_neon, multiply_whole_dotprod, round_neon, tile_neon)
static const Kernels i8mm_bf16 = with(neon, multiply_bf16, multiply_whole_i8mm, round_neon, tile_neon);

static const Kernels* const KERNELS[] = {&portable, &neon, &i8mm_bf16};
enum { PORTABLE, WITH_DOTPROD, WITH_I8MM_BF16 };

static void rest() {}
static bool slower_than_before(int) { return false; }

// Whether this CPU has instruction set `number`, and with it all that its kernels use. Bits as Linux gives them: the headers of an older C
// library have no names for some.
static bool has(int number) {
    const unsigned long ASIMDDP = 1 << 20, I8MM = 1 << 13, BF16 = 1 << 14, more = getauxval(AT_HWCAP2);
    switch (number) {
        case PORTABLE: return true;
        case WITH_DOTPROD: return getauxval(AT_HWCAP) & ASIMDDP;
        case WITH_I8MM_BF16: return has(WITH_DOTPROD) && more & I8MM && more & BF16;
    }
    return false;
}
