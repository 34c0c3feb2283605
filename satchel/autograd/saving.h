// The name of save_policy.h before 0.2: it goes with the next release.
#pragma once

#include "satchel/autograd/save_policy.h"
