// The old name of save_policy.h. It goes with the next release.
#pragma once

#include "satchel/autograd/save_policy.h"
