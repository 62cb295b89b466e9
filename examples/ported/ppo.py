"""A loop as in PPO scripts: rollouts, several epochs of minibatches on each, an annealed rate."""

import torch
from _told import arguments, meet, mine, tell
from torch import nn
from torch.distributions import Categorical

from p2pavg import CollaborativeOptimizer

args = arguments(__doc__)
num_iterations, num_steps, update_epochs, num_minibatches = 4, 32, 2, 2
learning_rate, clip_coef, ent_coef, vf_coef = 5e-3, 0.2, 0.01, 0.5


class Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 3))
        self.critic = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1))


torch.manual_seed(1)
model = Agent()
optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate, eps=1e-5)
if not args.alone:  # these two lines were added
    optimizer = CollaborativeOptimizer(optimizer, "ppo", "step", num_steps // num_minibatches // args.parts,
        initial_peers=args.initial_peers, compression="none")  # fmt: skip
    meet(optimizer, args)

losses, rates = [], []
for iteration in range(num_iterations):
    optimizer.param_groups[0]["lr"] = (1.0 - iteration / num_iterations) * learning_rate
    seed = torch.Generator().manual_seed(iteration)
    whole = torch.randn(num_steps, 6, generator=seed), torch.rand(num_steps, generator=seed)
    obs, luck = (mine(rows, args) for rows in whole)  # of this process's environments
    with torch.no_grad():
        chances = torch.softmax(model.actor(obs), dim=1)
        actions = (chances.cumsum(1) < luck[:, None]).sum(1).clamp(max=2)
        logprobs = Categorical(probs=chances).log_prob(actions)
        returns = (actions == obs[:, :3].argmax(1)).float()
        advantages = returns - model.critic(obs).squeeze(1)
    for _ in range(update_epochs):
        for index in torch.arange(len(obs)).chunk(num_minibatches):
            policy = Categorical(logits=model.actor(obs[index]))
            ratio = (policy.log_prob(actions[index]) - logprobs[index]).exp()
            gain = advantages[index]
            pg_loss = torch.max(-gain * ratio, -gain * ratio.clamp(1 - clip_coef, 1 + clip_coef)).mean()
            v_loss = 0.5 * (model.critic(obs[index]).squeeze(1) - returns[index]).square().mean()
            loss = pg_loss - ent_coef * policy.entropy().mean() + vf_coef * v_loss
            optimizer.zero_grad()
            loss.backward()
            losses.append(loss.item())
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
tell(model, losses, rates)
if not args.alone:
    optimizer.close()
