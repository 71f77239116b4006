// All of Orrery:
//
//   orrery::Engine engine = orrery::Engine::open("cosmos3-nano");
//   orrery::Request request;
//   request.prompt = "A small red circle moves left on a black background.";
//   orrery::save_output("circle.mp4", engine.generate(request));
//
// Every function throws orrery::Error.
#pragma once

#include "orrery/choices.h"
#include "orrery/compare.h"
#include "orrery/engine.h"
#include "orrery/error.h"
#include "orrery/fields.h"
#include "orrery/job.h"
#include "orrery/media.h"
#include "orrery/output.h"
#include "orrery/request.h"
#include "orrery/result.h"
#include "orrery/version.h"
