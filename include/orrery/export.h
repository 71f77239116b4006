// Which symbols a shared library shows: those of namespaces marked ORRERY_API.
#pragma once

#define ORRERY_API [[gnu::visibility("default")]]
