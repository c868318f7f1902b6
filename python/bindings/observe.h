// Calls of the library as Python sees them: what ran, why others did not, and an implementation that the user asks for.
#pragma once

#include <string>
#include <utility>

#include "convert.h"

namespace fastweight::bindings {

// Puts into the context what the user has asked for; `entry` is the name of the library's function.
void prepare(const char* entry, Context& context);

// Keeps the name of what ran.
void remember(const char* entry, const std::string& implementation);

// The library's function of this name in this context.
template <class Args>
void call(const char* entry, std::string (*function)(const Context&, const Args&), ContextOf&& context,
          const Args& args) {
  prepare(entry, *context.operator->());
  remember(entry, function(context, args));
}

}  // namespace fastweight::bindings
