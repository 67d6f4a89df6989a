#pragma once

#define REWY_VERSION_MAJOR 0
#define REWY_VERSION_MINOR 1
#define REWY_VERSION_PATCH 0
#define REWY_VERSION "0.1.0"
