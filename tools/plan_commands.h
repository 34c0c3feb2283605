// `satchel plan`: what a model keeps for backward, from sizes alone.
#pragma once

namespace CLI {
class App;
}

namespace satchel::tool {

void add_plan_command(CLI::App& app);

}  // namespace satchel::tool
