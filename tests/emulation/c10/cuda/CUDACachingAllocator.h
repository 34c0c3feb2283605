#pragma once

#include "CUDAFunctions.h"
