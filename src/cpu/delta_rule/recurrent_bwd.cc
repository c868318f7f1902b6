#include "cpu/delta_rule/implementations.h"
namespace fastweight::cpu {
void recurrent_backward(const DeltaRuleBackwardProblem& problem, const Context& context) { reference_backward(problem, context); }
}
