#pragma once

#include "CUDAStream.h"
