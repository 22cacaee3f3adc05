// The variants of arm64: included by kernels.h.
#pragma once

static const Kernels* const KERNELS[] = {&portable};
enum { PORTABLE };

static void rest() {}

// Whether this CPU has instruction set `number`, and with it all that its kernels use.
static bool has(int number) { return number == PORTABLE; }
