// Every processor: compiled with the default flags.
#define DETATTN_ISA baseline
#include "instance.h"
